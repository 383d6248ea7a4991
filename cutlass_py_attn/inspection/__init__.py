"""What a kernel compiles to: PTX and SASS with the numbered steps of its source, resources, maps, differences."""
