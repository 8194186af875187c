"""What of a device is as expected: facts of its contract, kernels, methods, memory, speed; one file and one page."""
