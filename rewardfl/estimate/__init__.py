"""What a run takes before it is run: FLOPs, memory by phase, disk. For --dry-run and tools/plan_run.py alone."""
