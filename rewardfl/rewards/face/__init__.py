"""The likeness of a face: detect, track, align, embed."""
