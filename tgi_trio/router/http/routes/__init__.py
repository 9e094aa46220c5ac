"""The routes, by API family. Each is a function of a `Call` that returns a `Reply`."""
