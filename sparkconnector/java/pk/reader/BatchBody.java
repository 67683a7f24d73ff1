// The body of a record batch: sections of raw columns (log/columns.py has the layout and the checks).
//
// Local invariants
//   B1  Every section's size is compared with the bytes that are left before it is read or anything is
//       allocated for it; the sections fill the body exactly (rules S7, L13).
//   B2  A null has no bytes, offsets grow, timestamps lie in the header's bounds, header keys are utf-8.
//   B3  Decoding allocates at most the announced size, and 16 bytes for each record and header.
package pk.reader;

import com.github.luben.zstd.Zstd;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.vectorized.ColumnVector;

final class BatchBody {
  private static final int LZ4 = 1;
  private static final int ZSTD = 2;

  private final BatchHeader header;
  private final int count;
  private final byte[] data;
  private final int end;
  private int at;
  private final int timestampsAt;
  private final int deltasAt;
  private final Strings keys;
  private final Strings values;
  private final int[] headerStarts;
  private final Strings headerKeys;
  private final Strings headerValues;

  /** A variable-length column: where its values begin and which are null. */
  private final class Strings {
    final int[] starts;
    int bitsAt = -1;

    Strings(int size, String what) throws IOException {
      starts = lengths(size, what);
    }

    void bits(boolean present) throws IOException {
      if (present) {
        bitsAt = take((starts.length + 6L) / 8, "validity");
      }
    }

    /** Takes the bytes of the values, and turns lengths into places. */
    void data(String what) throws IOException {
      int size = starts[starts.length - 1];
      int first = take(size, what);
      for (int n = 0; n < starts.length; n++) {
        starts[n] += first;
      }
      for (int n = 0; bitsAt >= 0 && n < starts.length - 1; n++) { // B2
        if ((data[bitsAt + (n >> 3)] >> (n & 7) & 1) == 0 && starts[n] != starts[n + 1]) {
          throw new IOException("batch body: a null that has bytes");
        }
      }
    }

    ColumnVector column(DataType type, int first, int rows) {
      return new Vectors.Bytes(
          type, data, starts, bitsAt < 0 ? null : data, Math.max(0, bitsAt), first, rows);
    }
  }

  BatchBody(BatchHeader header, int decodedBytesMost) throws IOException {
    this.header = header;
    count = header.count;
    int codec = header.codec();
    if (codec == 0) {
      data = header.bytes;
      at = header.at + BatchHeader.BYTES;
      end = header.at + header.length;
      checkSize(end - at, decodedBytesMost);
    } else {
      data = decoded(codec, decodedBytesMost);
      end = data.length;
    }
    boolean wide = header.has(BatchHeader.TIMESTAMPS_I64);
    timestampsAt = header.has(BatchHeader.TIMESTAMPS)
        ? take(count * (wide ? 8L : 4L), "timestamps") : -1;
    deltasAt = header.has(BatchHeader.OFFSET_DELTAS) ? take(count * 4L, "offset deltas") : -1;
    keys = header.has(BatchHeader.KEY) ? new Strings(count, "key lengths") : null;
    values = header.has(BatchHeader.VALUE) ? new Strings(count, "value lengths") : null;
    boolean some = header.has(BatchHeader.HEADERS);
    headerStarts = some ? lengths(count, "header counts") : null;
    int all = some ? headerStarts[count] : 0;
    headerKeys = some ? new Strings(all, "header key lengths") : null;
    headerValues = some ? new Strings(all, "header value lengths") : null;
    sections();
    if (at != end) {
      throw new IOException("batch body: " + (end - at) + " bytes too many");
    }
    checkRows();
  }

  private void sections() throws IOException {
    if (keys != null) {
      keys.bits(header.has(BatchHeader.KEY_NULLS));
    }
    if (values != null) {
      values.bits(header.has(BatchHeader.VALUE_NULLS));
    }
    if (headerValues != null) {
      headerValues.bits(header.has(BatchHeader.HEADER_NULLS));
    }
    if (keys != null) {
      keys.data("keys");
    }
    if (values != null) {
      values.data("values");
    }
    if (headerKeys != null) {
      headerKeys.data("header keys");
      headerValues.data("header values");
    }
  }

  private static void checkSize(int size, int most) throws IOException {
    if (size < 0 || size > most) {
      throw new IOException("a batch that decodes to " + size + " bytes; at most " + most);
    }
  }

  private byte[] decoded(int codec, int most) throws IOException {
    int start = header.at + BatchHeader.BYTES + 4;
    int stop = header.at + header.length;
    if (stop < start) {
      throw new IOException("batch body: compressed, but without a decoded length");
    }
    int size = (int) BatchHeader.INT.get(header.bytes, start - 4);
    checkSize(size, most);
    if (codec == LZ4) {
      return Lz4.decode(header.bytes, start, stop, size);
    }
    if (codec != ZSTD) {
      throw new IOException("batch body: codec " + codec);
    }
    byte[] found = new byte[size];
    long got = Zstd.decompressByteArray(found, 0, size, header.bytes, start, stop - start);
    if (Zstd.isError(got) || got != size) {
      throw new IOException("batch body: zstd decoded " + got + " of " + size + " bytes");
    }
    return found;
  }

  private int take(long size, String what) throws IOException {
    if (size > end - at) {
      throw new IOException("batch body: " + what + " take " + size + ", " + (end - at) + " left");
    }
    int start = at;
    at += (int) size;
    return start;
  }

  /** Reads `size` lengths and returns their running sums, from 0 on; the last is their total. */
  private int[] lengths(int size, String what) throws IOException {
    int start = take(size * 4L, what);
    int[] found = new int[size + 1];
    long sum = 0;
    for (int n = 0; n < size; n++) {
      sum += (int) BatchHeader.INT.get(data, start + 4 * n) & 0xffffffffL;
      if (sum > Integer.MAX_VALUE) {
        throw new IOException("batch body: " + what + " beyond the body");
      }
      found[n + 1] = (int) sum;
    }
    return found;
  }

  private void checkRows() throws IOException {
    if (deltasAt >= 0) {
      long before = -1;
      for (int n = 0; n < count; n++) {
        long delta = delta(n);
        if (delta <= before) {
          throw new IOException("batch body: offsets do not grow");
        }
        before = delta;
      }
      if (before > header.lastOffsetDelta) {
        throw new IOException("batch body: an offset behind the batch");
      }
    }
    if (timestampsAt >= 0 && !header.has(BatchHeader.LOG_APPEND_TIME)) {
      long least = header.has(BatchHeader.DELETE_HORIZON)
          ? BatchHeader.TIMESTAMP_MS_LEAST : header.baseTimestamp;
      for (int n = 0; n < count; n++) {
        long stamp = stamp(n);
        if (stamp < least || stamp > header.maxTimestamp) {
          throw new IOException("batch body: a timestamp outside the header's bounds");
        }
      }
    }
    if (headerKeys != null) {
      checkTexts();
    }
  }

  private void checkTexts() throws IOException {
    for (int n = 0; n < headerKeys.starts.length - 1; n++) {
      int start = headerKeys.starts[n];
      // throws CharacterCodingException, an IOException
      StandardCharsets.UTF_8.newDecoder()
          .decode(ByteBuffer.wrap(data, start, headerKeys.starts[n + 1] - start));
    }
  }

  private long delta(int row) {
    return (int) BatchHeader.INT.get(data, deltasAt + 4 * row) & 0xffffffffL;
  }

  private long stamp(int row) {
    return header.has(BatchHeader.TIMESTAMPS_I64)
        ? (long) BatchHeader.LONG.get(data, timestampsAt + 8 * row)
        : header.baseTimestamp
            + ((int) BatchHeader.INT.get(data, timestampsAt + 4 * row) & 0xffffffffL);
  }

  /** Returns the offset of a row. */
  long offset(int row) {
    return header.baseOffset + (deltasAt < 0 ? row : delta(row));
  }

  /** Returns the first row at or behind an offset. */
  int rowAt(long offset) {
    int low = 0;
    int high = count;
    while (low < high) {
      int middle = (low + high) >>> 1;
      if (offset(middle) < offset) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  /** Returns the column of that name, rows `[first, first + rows)`. */
  ColumnVector column(String name, DataType type, int first, int rows) throws IOException {
    switch (name) {
      case "key":
        return keys == null ? new Vectors.Nulls(type, rows) : keys.column(type, first, rows);
      case "value":
        return values == null ? new Vectors.Nulls(type, rows) : values.column(type, first, rows);
      case "offset":
        return offsets(type, first, rows);
      case "timestamp":
        return timestamps(type, first, rows);
      case "headers":
        return headers(type, first, rows);
      default:
        throw new IOException("no column " + name);
    }
  }

  private ColumnVector offsets(DataType type, int first, int rows) {
    long[] found = new long[rows];
    for (int n = 0; n < rows; n++) {
      found[n] = offset(first + n);
    }
    return new Vectors.Longs(type, found, 0);
  }

  private ColumnVector timestamps(DataType type, int first, int rows) {
    long[] found = new long[rows];
    if (timestampsAt < 0 || header.has(BatchHeader.LOG_APPEND_TIME)) {
      Arrays.fill(found, header.maxTimestamp * 1000);
    } else {
      for (int n = 0; n < rows; n++) {
        found[n] = stamp(first + n) * 1000;
      }
    }
    return new Vectors.Longs(type, found, 0);
  }

  private ColumnVector headers(DataType type, int first, int rows) {
    if (headerKeys == null) {
      return new Vectors.Nulls(type, rows);
    }
    int all = headerKeys.starts.length - 1;
    return new Vectors.Headers(
        type,
        ((ArrayType) type).elementType(),
        headerKeys.column(DataTypes.StringType, 0, all),
        headerValues.column(DataTypes.BinaryType, 0, all),
        headerStarts,
        first,
        rows);
  }
}
