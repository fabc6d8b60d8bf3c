"""Names and methods that scripts written for older versions of transformers use."""
