"""Where and how tensors are computed: the device, and its precision."""
