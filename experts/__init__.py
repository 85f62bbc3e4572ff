import raytrain as raytrain  # which imports the other packages from beside this one
