"""Images, video and audio: encoding them to features, and prefilling prompts that contain them."""
