"""Parts of the array backends that hold no array operation: written once, array functions are handed in."""
