"""Tests on a GPU: cases as data, the bodies that run and judge them, and the tests themselves."""
