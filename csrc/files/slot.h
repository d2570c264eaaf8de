/* Slots on disk: which of them new blocks get, and where a key's block is, which the other processes are told. */
#ifndef KVS_FILE_SLOT_H
#define KVS_FILE_SLOT_H

#include "files/state.h"

enum kvs_file_slot_answer { KVS_FILE_SLOT, KVS_FILE_WAIT, KVS_FILE_NONE_LEFT };
/* SLOT: item->slot is set, and item->victim if a block was evicted. WAIT: the item is in store->starved. NONE_LEFT:
 * *code is an errno; 0: all blocks are pinned. May release the lock temporarily. */
enum kvs_file_slot_answer kvs_file_slot_take_locked(struct kvs_file_item *, int *code);
/* A free slot, or that of the least recently used block, without file system calls. False: an engine thread has to look
 * for a slot. */
bool kvs_file_slot_take_now_locked(struct kvs_file_item *);
void kvs_file_slot_return_locked(struct kvs_file_item *); /* give an unwritten slot back and undo the eviction */
void kvs_file_slot_give_locked(struct kvs_file_store *, uint32_t slot);
/* A write of the slot failed. `erased`: the slot is free again, otherwise it is lost. */
void kvs_file_slot_failed_locked(struct kvs_file_store *, uint32_t slot, bool erased, int code);
void kvs_file_wake_starved_locked(struct kvs_file_store *);     /* all */
void kvs_file_wake_starved_one_locked(struct kvs_file_store *); /* the oldest, if it may find a slot now */
/* No load reads the claimed block any more: the oldest starved item evicts it. */
void kvs_file_claimed_ended_locked(struct kvs_file_store *);
/* Another process has a block of the key in `slot`. An own block is preferred. */
void kvs_file_learn_locked(struct kvs_file_store *, struct kvs_file_entry *, uint32_t slot);
/* Where the entry has no block and no store or delete holds the key: take another process's, if one is known. */
void kvs_file_fall_back_locked(struct kvs_file_store *, struct kvs_file_entry *);

/* Change where a key's block is, and tell the other processes. */
void kvs_file_set_slot_locked(struct kvs_file_store *, struct kvs_file_entry *, uint32_t slot);
/* End store->growing: with a segment, or the error of making it; or there is no room, and again_ns is when to ask. */
void kvs_file_grown_locked(struct kvs_file_store *, unsigned root, int code, uint32_t number, int fd);
void kvs_file_not_grown_locked(struct kvs_file_store *, unsigned root, uint64_t again_ns);
bool kvs_file_free_push(struct kvs_file_store *, uint32_t slot); /* under lock; false: no memory, the slot is lost */

#endif
