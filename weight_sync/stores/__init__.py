"""One module per format; `detect.open_store` finds by content which one a file or folder is."""
