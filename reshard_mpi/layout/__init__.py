"""Where everything goes: what each mesh axis does to each tensor, and the case that comes out. Pure."""
