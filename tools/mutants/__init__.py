"""Random single changes of the library, and the tests that detect them."""
