"""Reading the weight files of a model directory in parts: each rank reads what it will hold."""
