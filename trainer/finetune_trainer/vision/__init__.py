"""Vision-language models: module names of each family, image and video processing, placeholders, frozen parts."""
