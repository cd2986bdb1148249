"""Where weights and activations live: swapping, offloading, attention kernels, compilation, sharded tensors."""
