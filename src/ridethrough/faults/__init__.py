"""Faults on purpose: the seeded schedule, the kinds of fault, and the injector that fires each exactly once per job."""
