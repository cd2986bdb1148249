"""Models of images: one module per architecture on a common pipeline."""
