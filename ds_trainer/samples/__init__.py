"""From files as people have them to samples: records, chat templates, images, prepared datasets."""
