"""The commands: as files of a checkout `python tools/merge_lora.py`, installed `rewardfl-merge-lora`."""

from rewardfl.files import escape_unencodable_output

escape_unencodable_output()  # here, because every tool imports this package
