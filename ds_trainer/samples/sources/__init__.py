"""Training data as people have it: files of many formats, found, read and checked as records."""
