"""What happens once, before the first step: checks, process set-up, header, batch-size search."""
