// The 64-byte header of a record batch (log/batch.py; docs/design/0001 has the layout).
//
// Local invariants: those of log/batch.  The checks are the same ones in the same order, because a batch
// that Python refuses must not be read here.
package pk.reader;

import java.io.IOException;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.nio.ByteOrder;
import java.util.zip.CRC32C;

final class BatchHeader {
  static final int BYTES = 64;
  static final int LOG_APPEND_TIME = 1 << 2;
  static final int TRANSACTIONAL = 1 << 3;
  static final int CONTROL = 1 << 4;
  static final int DELETE_HORIZON = 1 << 5;
  static final int TIMESTAMPS = 1 << 6;
  static final int TIMESTAMPS_I64 = 1 << 7;
  static final int OFFSET_DELTAS = 1 << 8;
  static final int KEY = 1 << 9;
  static final int KEY_NULLS = 1 << 10;
  static final int VALUE = 1 << 11;
  static final int VALUE_NULLS = 1 << 12;
  static final int HEADERS = 1 << 13;
  static final int HEADER_NULLS = 1 << 14;
  static final int CODECS = 3;
  static final long TIMESTAMP_MS_LEAST = -62_135_596_800_000L;
  static final long TIMESTAMP_MS_MOST = 253_402_300_799_999L;
  static final VarHandle INT =
      MethodHandles.byteArrayViewVarHandle(int[].class, ByteOrder.LITTLE_ENDIAN);
  static final VarHandle LONG =
      MethodHandles.byteArrayViewVarHandle(long[].class, ByteOrder.LITTLE_ENDIAN);
  private static final int MAGIC = 0x50;
  private static final int CRC_START = 24;
  private static final int CODEC_MASK = 0x8003;
  private static final int BODY_FLAGS = CODEC_MASK | 0x7FC0;
  private static final int RECORDS_MOST = 1_000_000;
  private static final int[][] NEEDS = {
    {TIMESTAMPS_I64, TIMESTAMPS}, {KEY_NULLS, KEY}, {VALUE_NULLS, VALUE}, {HEADER_NULLS, HEADERS}
  };

  /** Where the batch begins in `bytes`. */
  final int at;
  final byte[] bytes;
  final long baseOffset;
  final int length;
  final int magic;
  final int crc;
  final int attributes;
  final int producerEpoch;
  final int lastOffsetDelta;
  final long baseTimestamp;
  final long maxTimestamp;
  final long producerId;
  final int baseSequence;
  final int count;

  /** Reads and checks the header at `at`; `limit` ends the bytes that are there. */
  BatchHeader(byte[] bytes, int at, int limit) throws IOException {
    if (limit - at < BYTES) {
      throw new IOException((limit - at) + " bytes are no batch header");
    }
    this.at = at;
    this.bytes = bytes;
    baseOffset = (long) LONG.get(bytes, at);
    length = (int) INT.get(bytes, at + 8);
    magic = (int) INT.get(bytes, at + 16);
    crc = (int) INT.get(bytes, at + 20);
    attributes = (bytes[at + 24] & 0xff) | (bytes[at + 25] & 0xff) << 8;
    producerEpoch = (short) ((bytes[at + 26] & 0xff) | (bytes[at + 27] & 0xff) << 8);
    lastOffsetDelta = (int) INT.get(bytes, at + 28);
    baseTimestamp = (long) LONG.get(bytes, at + 32);
    maxTimestamp = (long) LONG.get(bytes, at + 40);
    producerId = (long) LONG.get(bytes, at + 48);
    baseSequence = (int) INT.get(bytes, at + 56);
    count = (int) INT.get(bytes, at + 60);
    String problem = problem();
    if (problem != null) {
      throw new IOException("batch header: " + problem);
    }
    if (length > limit - at) {
      throw new IOException((limit - at) + " bytes of a batch of " + length);
    }
  }

  boolean has(int flag) {
    return (attributes & flag) != 0;
  }

  int codec() {
    return attributes & 3 | attributes >> 13 & 4;
  }

  long nextOffset() {
    return baseOffset + lastOffsetDelta + 1;
  }

  private String problem() {
    if (magic != MAGIC || length < BYTES || count < 0 || count > RECORDS_MOST) {
      return "magic, length or record count";
    }
    if (lastOffsetDelta < Math.max(0, count - 1)) {
      return "more records than offsets";
    }
    if (codec() >= CODECS) {
      return "codec " + codec(); // of a newer pk, or damage: Python finds out
    }
    for (int[] each : NEEDS) {
      if (has(each[0]) && !has(each[1])) {
        return "contradictory attributes";
      }
    }
    if (count == 0 ? has(BODY_FLAGS) || length != BYTES
        : !has(OFFSET_DELTAS) && lastOffsetDelta != count - 1) {
      return "the record count contradicts the offsets or the body";
    }
    if (baseOffset < 0 || baseOffset > Long.MAX_VALUE - 1 - lastOffsetDelta) {
      return "base offset";
    }
    return timesProblem();
  }

  private String timesProblem() {
    if (baseTimestamp < TIMESTAMP_MS_LEAST || baseTimestamp > TIMESTAMP_MS_MOST
        || maxTimestamp < TIMESTAMP_MS_LEAST || maxTimestamp > TIMESTAMP_MS_MOST) {
      return "timestamps";
    }
    if (has(DELETE_HORIZON) ? count > 0 && !has(TIMESTAMPS_I64) : baseTimestamp > maxTimestamp) {
      return "timestamps";
    }
    if (producerId < -1 || producerEpoch < -1 || baseSequence < -1
        || (producerId == -1 ? baseSequence != -1 : producerEpoch == -1)) {
      return "producer";
    }
    return null;
  }

  /** Verifies the checksum over the rest of the header and the body. */
  void verify() throws IOException {
    CRC32C found = new CRC32C();
    found.update(bytes, at + CRC_START, length - CRC_START);
    if ((int) found.getValue() != crc) {
      throw new IOException("the checksum of the batch at " + baseOffset + " does not match");
    }
  }

  /** Refuses a batch that does not fit between its neighbours (log/batch.check_place). */
  void checkPlace(long before, long after, boolean first, boolean dense) throws IOException {
    boolean believed = first ? baseOffset <= before : baseOffset == before;
    boolean misplaced =
        (baseOffset < before && !first) || (nextOffset() > after && !believed);
    if (misplaced || (dense && !believed)) {
      throw new IOException(
          "a batch of [" + baseOffset + ", " + nextOffset() + ") between " + before + " and "
              + after);
    }
  }
}
