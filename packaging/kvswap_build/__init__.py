"""What setup.py and CMakeLists.txt build kvswap with; packaging/ builds and checks wheels by it, too."""
