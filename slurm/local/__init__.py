"""Jobs on this machine: a controller process in a session of its own, and the ranks that it starts."""
