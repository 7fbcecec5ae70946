"""What a step must cost, in SI units. Pure: no backend, no numpy, no clock."""
