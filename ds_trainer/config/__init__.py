"""What DeepSpeed is told: arguments + layout + model shape compiled into one JSON."""
