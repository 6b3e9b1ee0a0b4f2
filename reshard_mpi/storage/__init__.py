"""How arrays lie in files: headers and byte spans."""
