"""The routes, by API family; each is a function from a `Call` to a `Reply`."""
