"""The commands: `python tools/merge_lora.py` in a checkout, `rewardfl-merge-lora` where it is installed."""
