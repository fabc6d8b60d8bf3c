"""What refuses arguments: wrong types, values, combinations, and what a DeepSpeed engine does not support."""
