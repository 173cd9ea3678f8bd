"""How a job advances: plans, fault reports, and the pure machine that turns events into the next plan.

Nothing in this room reads a clock, opens a socket or starts a thread: time comes in with each event, and what is to be
done goes out as actions. Room `launch` carries both over real processes.
"""
