"""What does the work: the only folder that calls ``deepspeed.initialize`` or reaches into its runtime."""
