"""The pod lab: a small cluster on one machine, for what cannot be tried without one. Linux, root, iproute2.

A pod is a network namespace, a memory cgroup, a private /dev/shm and a process tree made from the rendered spec:
command, environment, limits, grace, volumes. Names resolve through a real DNS server. Jobs are kept by the rules of the
Job controller (indices, failure policy, back-off). A folder is the ReadWriteMany volume.
"""
