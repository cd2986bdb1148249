"""Rewards of the tiny images: does a picture show the scene that its prompt names?"""
