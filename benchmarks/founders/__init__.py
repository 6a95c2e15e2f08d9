"""What the founding systems published, and belady's planners on the machines that they had."""
