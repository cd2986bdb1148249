"""What a run takes before it is run: FLOPs, memory by phase, disk. For --dry-run, plan_run and doctor."""
