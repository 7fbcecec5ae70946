"""Time: how long steps take, what a run will do, and why a request was slow."""
