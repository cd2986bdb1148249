"""Training data: clips and their table, the order of training, and the cache of computed tensors."""

# ruff: noqa: F401  (this file only re-exports)

from rewardfl.data.clips import (
    DataError,
    clip_size,
    encode_video,
    fit,
    read_clip,
    read_picture,
    read_video,
    side_by_side,
    to_float,
    to_uint8,
    write_picture,
    write_video,
)
from rewardfl.data.metadata import (
    Example,
    HeaderInfo,
    Row,
    assign_images,
    clip_notes,
    inspect_row,
    load_example,
    load_metadata,
    load_pictures,
    notes,
    photo_files,
    usable_rows,
)
from rewardfl.epoch_order import one_shape_batch
