"""Engine simulators: ranks that dial in, decode requests and emit output frames as the real engines do."""
