# libkvswap, the C library, without CMake: `make && make install PREFIX=/usr/local`. docs/c.md describes it; setup.py
# builds the Python package. Settings, on the command line or in the environment:
#   PREFIX, LIBDIR, INCLUDEDIR, DESTDIR   where it is installed
#   BUILD                                 where it is built
#   CC, CFLAGS, LDFLAGS                   as usual
#   KVSWAP_CUDA, KVSWAP_NVCC, KVSWAP_URING, KVSWAP_SANITIZE, KVSWAP_WERROR, KVSWAP_DEBUG   as for setup.py
#   V=1                                   print the commands
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
BUILD ?= build/make
PYTHON ?= python3
INSTALL ?= install
KVSWAP_CUDA ?= auto
KVSWAP_URING ?= auto
CFLAGS ?= $(if $(filter-out 0,$(KVSWAP_DEBUG)),-O0 -g3,-O3 -g1 -DNDEBUG)

version := $(shell sed -n 's/^version = "\([^"]*\)".*/\1/p' pyproject.toml)
numbers := $(subst ., ,$(shell echo '$(version)' | grep -o '^[0-9]*\.[0-9]*\.[0-9]*'))
abi := $(shell sed -n 's/^\#define KVSWAP_ABI_VERSION //p' csrc/kvswap.h)
soname := libkvswap.so.$(abi)
library := $(soname).$(subst $() ,.,$(numbers))

sources := $(filter-out csrc/py/%,$(wildcard csrc/*.c csrc/*/*.c))
objects := $(sources:csrc/%.c=$(BUILD)/objects/%.o)
headers := $(filter-out %/kvswap_capi.h %/kvswap_version.h,$(wildcard csrc/kvswap*.h))
include := $(BUILD)/include/kvswap
copies := $(headers:csrc/%=$(include)/%) $(include)/kvswap_version.h
examples := $(patsubst examples/c/%.c,$(BUILD)/examples/%,$(wildcard examples/c/*.c))

warnings := -Wall -Wextra -Wshadow -Wconversion $(if $(filter-out 0,$(KVSWAP_WERROR)),-Werror)
sanitize := $(if $(KVSWAP_SANITIZE),-fsanitize=$(KVSWAP_SANITIZE) -fno-omit-frame-pointer)
flags := -std=c11 -D_GNU_SOURCE -Icsrc -fPIC -fvisibility=hidden -pthread $(warnings) $(sanitize)
libs := -pthread -ldl -lm

# What the machine has is asked once, when something is built.
ifneq ($(filter-out clean install uninstall,$(or $(MAKECMDGOALS),all)),)
  ifeq ($(filter $(KVSWAP_CUDA),auto require off),)
    $(error KVSWAP_CUDA=$(KVSWAP_CUDA): must be auto, require or off)
  endif
  ifeq ($(filter $(KVSWAP_URING),auto require off),)
    $(error KVSWAP_URING=$(KVSWAP_URING): must be auto, require or off)
  endif
  ifneq ($(KVSWAP_CUDA),off)
    nvcc := $(shell KVSWAP_NVCC='$(KVSWAP_NVCC)' $(PYTHON) setup_cuda.py find)
    ifneq ($(nvcc),)
      fatbin := $(BUILD)/fatbin.flags
    else ifneq ($(KVSWAP_NVCC)$(filter require,$(KVSWAP_CUDA)),)
      $(error KVSWAP_CUDA=$(KVSWAP_CUDA), but the kernels cannot be built: the line above says why)
    endif
  endif
  ifneq ($(KVSWAP_URING),off)
    uring := $(shell $(CC) cmake/uring.c -o /dev/null -luring 2>/dev/null && echo on)
    ifneq ($(uring),)
      flags += -DKVSWAP_URING=1
    else ifeq ($(KVSWAP_URING),require)
      $(error KVSWAP_URING=require, but there is no liburing to build with (liburing-dev))
    endif
  endif
  without_kernels := none, GPUs are served by their copy engines alone
  without_uring := off, files are read and written by threads
  $(info kvswap $(version): kernels: $(if $(nvcc),by $(nvcc),$(without_kernels)))
  $(info kvswap $(version): io_uring: $(or $(uring),$(without_uring)))
endif
libs += $(if $(uring),-luring)
Q := $(if $(V),,@)

all: $(BUILD)/libkvswap.so $(BUILD)/libkvswap.a $(BUILD)/libs $(copies)

examples: $(examples)

# Compiled again when a flag changes.
$(BUILD)/flags: force
	@mkdir -p $(@D)
	@echo '$(CC) $(flags) $(CFLAGS) $(LDFLAGS) $(libs) $(version)' | cmp -s - $@ || \
	  echo '$(CC) $(flags) $(CFLAGS) $(LDFLAGS) $(libs) $(version)' >$@

$(BUILD)/objects/%.o: csrc/%.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(if $(V),,@echo '  CC $<')
	$(Q)$(CC) $(flags) $(more) $(CFLAGS) $(CPPFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/objects/base/version.o: more := -DKVSWAP_VERSION='"$(version)"'
ifneq ($(fatbin),)
$(BUILD)/objects/cuda/fatbin.o: more := @$(fatbin)
$(BUILD)/objects/cuda/fatbin.o: $(fatbin)
$(fatbin): setup_cuda.py $(wildcard csrc/kernels/*.cu csrc/kernels/*.cuh csrc/kernels/*.h csrc/codecs/*.h csrc/codecs/*.cuh)
	@mkdir -p $(@D)
	KVSWAP_NVCC='$(KVSWAP_NVCC)' $(PYTHON) setup_cuda.py build $(BUILD)
endif

$(BUILD)/$(library): $(objects)
	$(if $(V),,@echo '  LINK $@')
	$(Q)$(CC) -shared -Wl,-soname,$(soname) $(if $(sanitize),,-Wl,-z,defs) $(sanitize) $(LDFLAGS) $^ $(libs) -o $@

$(BUILD)/libkvswap.so: $(BUILD)/$(library)
	$(Q)ln -sf $(library) $(BUILD)/$(soname) && ln -sf $(soname) $@

$(BUILD)/libkvswap.a: $(objects)
	$(if $(V),,@echo '  AR $@')
	$(Q)rm -f $@ && $(AR) rcs $@ $^

$(include)/%.h: csrc/%.h
	@mkdir -p $(@D) && cp $< $@

$(include)/kvswap_version.h: cmake/kvswap_version.h.in pyproject.toml
	@mkdir -p $(@D)
	$(Q)sed -e 's/@KVSWAP_VERSION_MAJOR@/$(word 1,$(numbers))/' -e 's/@KVSWAP_VERSION_MINOR@/$(word 2,$(numbers))/' \
	  -e 's/@KVSWAP_VERSION_PATCH@/$(word 3,$(numbers))/' $< >$@

$(BUILD)/libs: $(BUILD)/flags
	@echo '$(libs)' >$@

$(BUILD)/examples/%: examples/c/%.c $(BUILD)/libkvswap.so $(copies)
	@mkdir -p $(@D)
	$(if $(V),,@echo '  CC $<')
	$(Q)$(CC) -std=c11 -I$(include) $(sanitize) $(CFLAGS) $< -L$(BUILD) -lkvswap -Wl,-rpath,'$$ORIGIN/..' -o $@

install:
	@test -e $(BUILD)/libs || { echo 'kvswap: nothing is built: run make first' >&2; exit 1; }
	$(INSTALL) -d $(DESTDIR)$(LIBDIR)/pkgconfig $(DESTDIR)$(INCLUDEDIR)/kvswap
	$(INSTALL) -m 755 $(BUILD)/$(library) $(DESTDIR)$(LIBDIR)
	ln -sf $(library) $(DESTDIR)$(LIBDIR)/$(soname)
	ln -sf $(soname) $(DESTDIR)$(LIBDIR)/libkvswap.so
	$(INSTALL) -m 644 $(BUILD)/libkvswap.a $(DESTDIR)$(LIBDIR)
	sed -e 's|@KVSWAP_PREFIX@|$(PREFIX)|' -e 's|@KVSWAP_LIBDIR@|$(LIBDIR:$(PREFIX)/%=$${prefix}/%)|' \
	  -e 's|@KVSWAP_INCLUDEDIR@|$(INCLUDEDIR:$(PREFIX)/%=$${prefix}/%)|' -e 's|@KVSWAP_VERSION@|$(version)|' \
	  -e "s|@KVSWAP_PRIVATE_LIBS@|$$(cat $(BUILD)/libs)|" cmake/kvswap.pc.in >$(DESTDIR)$(LIBDIR)/pkgconfig/kvswap.pc
	$(INSTALL) -m 644 $(copies) $(DESTDIR)$(INCLUDEDIR)/kvswap

uninstall:
	rm -f $(addprefix $(DESTDIR)$(LIBDIR)/,$(library) $(soname) libkvswap.so libkvswap.a pkgconfig/kvswap.pc)
	rm -f $(addprefix $(DESTDIR)$(INCLUDEDIR)/kvswap/,$(notdir $(copies)))

clean:
	rm -rf $(BUILD)

force:
.PHONY: all examples install uninstall clean force
.DELETE_ON_ERROR:
-include $(objects:.o=.d)
