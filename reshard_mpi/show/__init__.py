"""What people are shown: the plan, and what a checkpoint holds."""
