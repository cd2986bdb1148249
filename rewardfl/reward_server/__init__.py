"""The reward server of tools/serve_reward.py: any reward over HTTP, in safetensors."""
