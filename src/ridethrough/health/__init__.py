"""Is a rank well? The heartbeat page that a worker stamps, and the judge that reads it."""
