"""Which of several servers gets a request: the rule alone, for routers and for the simulator."""
