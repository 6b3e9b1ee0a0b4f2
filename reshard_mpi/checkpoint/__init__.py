"""What a checkpoint is: element types, meshes, the manifest, and what it may get wrong. Pure."""
