"""What people ask before they run something: what it needs, how long it will take, and why."""
