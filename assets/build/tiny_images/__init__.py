"""What tools/make_tiny_images.py is made of, and the two judges that configs/tiny_image_flow_grpo.yaml names."""
