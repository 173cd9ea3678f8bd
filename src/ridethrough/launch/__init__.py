"""Starts, watches and ends processes: the node agent, its zygote, the coordinator, logs."""
