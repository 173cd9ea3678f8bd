"""The reference job: a Llama on real text, sharded, with a state that survives faults. Start reading at `loop.py`."""
