"""Merge LoRAs into checkpoints, convert LoRAs, join and split shards, tensor by tensor."""
