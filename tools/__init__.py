"""The commands: as files of a checkout `python tools/merge_lora.py`, installed `rewardfl-merge-lora`."""
