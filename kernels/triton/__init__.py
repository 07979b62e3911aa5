"""The Triton kernels: device layout, decoders, products, codec, and the gate that proves them."""
