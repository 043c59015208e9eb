"""Below the device: moving frames to host memory and to storage and back, and what it is worth."""
